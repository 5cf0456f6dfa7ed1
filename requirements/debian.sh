#!/bin/sh
# Install Debian packages that are missing, where that can be done: sh debian.sh WHAT-FOR PACKAGE...
# Elsewhere one line says what will not be tested. Never fails.
for_what=$1
shift
missing=
for package; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Debian packages for $for_what:$missing"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } >/dev/null 2>&1 && exit 0
fi
echo "Not installed, so $for_what will not be tested:$missing"
