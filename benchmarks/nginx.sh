#!/bin/sh
# Prints where nginx is; where there is none, fetches Debian's package and unpacks it into a folder of the
# build's. Unpacked rather than installed: that needs no root, and no web server is started on port 80.
set -eu

folder=$1
for found in "$(command -v nginx || true)" /usr/sbin/nginx "$folder/usr/sbin/nginx"; do
  if [ -n "$found" ] && "$found" -v >/dev/null 2>&1; then
    echo "$found"
    exit 0
  fi
done

if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
  echo "nginx is not installed and there is no apt-get to fetch it with" >&2
  exit 1
fi
mkdir -p "$folder"
cd "$folder"
if ! apt-get download nginx >apt.log 2>&1; then
  # A fresh container has no package lists; only root can get them.
  [ "$(id -u)" = 0 ] && apt-get update >>apt.log 2>&1
  if ! apt-get download nginx >>apt.log 2>&1; then
    echo "nginx is not installed and could not be fetched (apt-get install nginx): $folder/apt.log" >&2
    exit 1
  fi
fi
dpkg-deb -x nginx_*.deb .
if ! ./usr/sbin/nginx -v >/dev/null 2>&1; then
  echo "the fetched nginx does not run here (apt-get install nginx)" >&2
  exit 1
fi
echo "$folder/usr/sbin/nginx"
