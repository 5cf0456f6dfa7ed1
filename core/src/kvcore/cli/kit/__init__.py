"""What commands are made with, those of packages of their own as well: arguments, output, progress, an end by Ctrl-C,
the caches that are open here, the configured tiers."""
