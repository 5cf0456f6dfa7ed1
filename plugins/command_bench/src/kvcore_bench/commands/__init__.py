"""What the entry points name: each command, light enough for `kvcore --help`."""
