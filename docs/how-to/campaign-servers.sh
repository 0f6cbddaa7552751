#!/bin/sh
# Starts the two servers of a campaign on this machine: Redis (or Valkey) and the head of Ray.
#
#   BLOCKSTEP_PASSWORD=... campaign-servers.sh FOLDER [ADDRESS]
#
# FOLDER holds what the store may not lose. ADDRESS is the address of this machine in its network.
# With FOLDER/server.crt, FOLDER/server.key and FOLDER/ca.crt the store takes only TLS.
set -eu
folder=${1:?name a folder}
address=${2:-127.0.0.1}
: "${BLOCKSTEP_PASSWORD:?set it to a long random text}"
umask 077
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
server=$(command -v redis-server || command -v valkey-server)

cat > "$folder/redis.conf" <<END
bind $address
requirepass $BLOCKSTEP_PASSWORD
dir $folder
appendonly yes
maxmemory-policy noeviction
rename-command FLUSHALL ""
rename-command CONFIG ""
daemonize yes
logfile $folder/redis.log
END
if [ -f "$folder/server.crt" ]; then
  cat >> "$folder/redis.conf" <<END
port 0
tls-port 6379
tls-cert-file $folder/server.crt
tls-key-file $folder/server.key
tls-ca-cert-file $folder/ca.crt
tls-auth-clients no
END
fi
"$server" "$folder/redis.conf"
echo "store: $address:6379"

if command -v ray > /dev/null; then
  RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$BLOCKSTEP_PASSWORD ray start --head \
    --node-ip-address="$address" --port=6380 --include-dashboard=false --disable-usage-stats
fi
