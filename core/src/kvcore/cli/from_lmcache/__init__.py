"""`kvcore config from-lmcache`: LMCache's YAML, environment variables or server flags as a kvcore.yaml."""
