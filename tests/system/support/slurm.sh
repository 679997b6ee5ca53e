#!/bin/bash
# slurm.sh: a private Slurm cluster on one machine, no systemd, no docker.
#   slurm.sh start DIR [NODES=2] [CPUS_PER_NODE=4]   munged, slurmctld and NODES x slurmd
#   slurm.sh stop  DIR                               stop what start started (by recorded pid)
#   slurm.sh env   DIR                               print the exports a client needs
#   slurm.sh client DIR CMD...                       run CMD as a user of the cluster
#   slurm.sh kill-node DIR N                         SIGKILL slurmd N (1-based); its tasks live on
#   slurm.sh start-node DIR N                        start that slurmd again
# With HOSTS=HDIR (a directory made by `hosts.sh up HDIR NODES`) node N runs inside pretend host N, under
# its own host name and address, and slurmctld inside host 1; without it everything is on loopback.
# In seconds: SLURMD_TIMEOUT (10), MESSAGE_TIMEOUT (10), KILL_WAIT (5), CRED_EXPIRE (5; a requeued job waits
# that long before it starts again: Slurm's own default is 120).  Needs slurm-wlm, munge, root.  Writes only in DIR.
# Debian 12's slurm 22.05 has MULTIPLE_SLURMD compiled in, so `slurmd -N` works.
set -euo pipefail

die() { echo "slurm: $*" >&2; exit 2; }
[ $# -ge 2 ] || { sed -n '2,/^set/p' "$0" | sed '$d;s/^# \{0,1\}//'; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
verb=$1; dir=$(mkdir -p "$2" && cd "$2" && pwd); shift 2
[ -n "${HOSTS-}" ] || { [ -s "$dir/hosts" ] && HOSTS=$(cat "$dir/hosts"); } || HOSTS=
export SLURM_CONF=$dir/slurm.conf
node=node; [ -z "$HOSTS" ] || node=host

at() {  # node cmd...: run on that node
    local n=$1; shift
    if [ -n "$HOSTS" ]; then "$here/hosts.sh" run "$HOSTS" "$n" "$@"; else "$@"; fi
}

pick_ports() {  # the first free block of 64 ports, so that clusters can live side by side
    [ -z "$HOSTS" ] || { echo 6800; return; }
    local used p; used=$(ss -Hltn | awk '{sub(/.*:/,"",$4); print $4}')
    for p in $(seq 21000 64 31000); do
        awk -v lo="$p" '$1>=lo && $1<lo+64 {bad=1} END {exit bad}' <<< "$used" && { echo "$p"; return; }
    done
    die "no free block of ports"
}

write_conf() {  # nodes cpus port
    if [ -n "$HOSTS" ]; then
        control="host1"
        members="NodeName=host[1-$1] Port=$(($3+1))"
    else
        control="localhost(127.0.0.1)"
        members="NodeName=node[1-$1] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$(($3+1))-$(($3+$1))]"
    fi
    cat > "$SLURM_CONF" <<CONF
ClusterName=lockstep
SlurmctldHost=$control
SlurmctldPort=$3
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=${CRED_EXPIRE:-5}
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0,sched_min_interval=100000,bf_interval=1
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=${SLURMD_TIMEOUT:-10}
InactiveLimit=0
MessageTimeout=${MESSAGE_TIMEOUT:-10}
KillWait=${KILL_WAIT:-5}
JobRequeue=1
$members CPUs=$2 RealMemory=1024 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

gone() { ! kill -0 "$1" 2>/dev/null || grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null; }
stop_pid() {  # pid seconds: TERM, wait, then KILL
    local i; gone "$1" && return; kill "$1"
    for ((i = 0; i < $2 * 50; i++)); do gone "$1" && return; sleep 0.02; done
    kill -9 "$1" 2>/dev/null || true
}
# slurmd writes the pid it sees itself, which in a pretend host is another one than ours: ask the kernel.
real_pid() {  # pidfile [node]
    local pid ns p
    pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] || return 1
    [ -n "$HOSTS" ] && [ -n "${2-}" ] || { echo "$pid"; return; }
    ns=$(readlink "/proc/$(cat "$HOSTS/host$2.pid" 2>/dev/null)/ns/pid" 2>/dev/null) || return 1
    for p in /proc/[0-9]*; do
        [ "$(readlink "$p/ns/pid" 2>/dev/null)" = "$ns" ] || continue
        [ "$(awk '/^NSpid:/ {print $NF}' "$p/status" 2>/dev/null)" != "$pid" ] || { echo "${p#/proc/}"; return; }
    done
    return 1
}
start_node() { at "$1" slurmd -N "$node$1" > "$dir/log/slurmd.$node$1.out" 2>&1; }

case $verb in
start)
    nodes=${1:-2}; cpus=${2:-4}
    mkdir -p "$dir"/{state,run,log,munge,spool}
    chmod 711 "$dir"; chmod 755 "$dir/munge"
    echo "$HOSTS" > "$dir/hosts"; echo "$nodes" > "$dir/nodes"
    write_conf "$nodes" "$cpus" "$(pick_ports)"
    [ -s "$dir/munge/key" ] || (umask 077; head -c 128 /dev/urandom > "$dir/munge/key")
    # --force: else munged refuses parents that others may write to, such as a temporary directory
    munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
           --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" \
           --seed-file="$dir/munge/seed" --num-threads=2 2> "$dir/log/munged.out" ||
        die "munged: $(cat "$dir/log/munged.out")"
    at 1 slurmctld -c > "$dir/log/slurmctld.out" 2>&1 || die "slurmctld: $(cat "$dir/log/slurmctld.out")"
    for ((n = 1; n <= nodes; n++)); do
        start_node "$n" || die "slurmd $n: $(cat "$dir/log/slurmd.$node$n.out")"
    done
    for ((i = 0; i < 600; i++)); do   # at most 30 s
        up=$(at 1 sinfo -h -N -o '%T' 2>/dev/null | grep -c '^idle$' || true)
        [ "$up" != "$nodes" ] || break
        sleep 0.05
    done
    [ "$up" = "$nodes" ] || die "only $up of $nodes nodes are idle: $(at 1 sinfo -N 2>&1)"
    ;;
stop)
    pids=()   # read first: the daemons remove their files as they end
    for ((n = 1; n <= $(cat "$dir/nodes"); n++)); do
        pid=$(real_pid "$dir/run/slurmd.$node$n.pid" "$n") && pids+=("$pid") || true
    done
    pid=$(real_pid "$dir/run/slurmctld.pid" 1) && pids+=("$pid") || true
    pid=$(real_pid "$dir/run/munged.pid") && pids+=("$pid") || true
    for pid in "${pids[@]}"; do stop_pid "$pid" 10; done
    ;;
env)        echo "export SLURM_CONF=$SLURM_CONF" ;;
client)     at 1 "$@" ;;
kill-node)  kill -9 "$(real_pid "$dir/run/slurmd.$node$1.pid" "$1")" ;;
start-node) start_node "$1" ;;
*) die "unknown verb $verb" ;;
esac
