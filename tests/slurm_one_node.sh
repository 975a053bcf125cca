#!/usr/bin/env bash
# A real Slurm on this machine alone: a job array shares a small grid, one task is cancelled half way, the array is submitted again.
#
#     sudo PYTHON="$(command -v python)" bash tests/slurm_one_node.sh           # about 2 minutes
#
# Where they are missing it installs Debian's packages slurm-wlm and munge, which stay.
# It passes if every row of the grid is there exactly once and, but for its seconds, equals that of one plain run. Run by hand; pytest
# does not collect it. Key, configuration, state and results lie in one temporary folder; a Slurm of the machine's own is neither read
# nor changed (other ports, other sockets), and at the end, however it ends, the daemons are stopped and the folder is removed.
# No cgroups, so it works in a container: processes are found in /proc and are not bound to cores.
set -euo pipefail

PYTHON=$(command -v "${PYTHON:-python}") || { echo "FAIL: no Python: set PYTHON"; exit 1; }
SCRIPT=$(cd "$(dirname "$0")/.." && pwd)/run_experiment.py
ROWS=40  # 2 tasks x 20 subsamples
FLAGS="--tasks rotten_tomatoes bbc_news --m 20 --n 20 --subsamples 20 --pretrain-epochs 1 --train-epochs 2 --max-length 48"
FLAGS="$FLAGS --workers 1 --threads 1 --device cpu"
LIMIT=600  # seconds, for each thing that is waited for

[ "$(id -u)" = 0 ] || { echo "FAIL: must run as root (the daemons start jobs)"; exit 1; }
PATH=$PATH:/usr/sbin
programs="munged slurmctld slurmd sbatch squeue scancel scontrol sinfo"
if [ "$(for program in $programs; do command -v $program; done | wc -l)" != "$(wc -w <<< "$programs")" ]; then
    apt-get update --quiet=2 && DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes slurm-wlm munge > /dev/null ||
        { echo "FAIL: no Slurm, and apt-get cannot install slurm-wlm and munge"; exit 1; }
fi
unset "${!SLURM_@}"
folder=$(mktemp -d)
chmod 755 "$folder"
export SLURM_CONF=$folder/slurm.conf
daemons=()

finish() {
    status=$?
    set +e
    trap - EXIT
    trap '' INT TERM  # timeout and Ctrl-C signal twice or the whole group; what follows must end
    if [ $status != 0 ]; then
        echo "--- ends of the logs"
        tail -n 15 "$folder"/*.log
    fi
    if [ ${#daemons[@]} -gt 2 ]; then  # all are up: end the jobs
        timeout 20 scancel --user root 2> /dev/null
        for _ in $(seq 50); do
            [ -z "$(timeout 20 squeue --noheader 2> /dev/null)" ] && break
            sleep 0.2
        done
    fi
    for daemon in "${daemons[@]}"; do kill "$daemon" 2> /dev/null; done
    for _ in $(seq 50); do
        kill -0 "${daemons[@]}" 2> /dev/null || break
        sleep 0.2
    done
    for daemon in "${daemons[@]}"; do kill -9 "$daemon" 2> /dev/null; done
    wait
    rm -rf "$folder"
    [ $status = 0 ] && echo "PASS in $SECONDS s" || echo "FAIL after $SECONDS s"
    exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

say() { printf '%4d s  %s\n' $SECONDS "$*"; }

wait_for() {  # wait_for WHAT COMMAND...: until the command succeeds, LIMIT seconds at most
    local what=$1 end=$((SECONDS + LIMIT))
    shift
    until "$@" > /dev/null 2>&1; do
        [ $SECONDS -lt $end ] || { echo "FAIL: waited $LIMIT s for $what"; exit 1; }
        sleep 0.1
    done
}

start_slurm() {
    local shape
    dd if=/dev/urandom of="$folder/munge.key" bs=1024 count=1 status=none
    chmod 400 "$folder/munge.key"
    mkdir "$folder/state" "$folder/spool"
    shape=$(slurmd -C | head -n 1 | grep -o 'CPUs=.*')  # CPUs, sockets, cores and memory of this machine
    cat > "$SLURM_CONF" << END
ClusterName=one
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CryptoType=crypto/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=$(hostname -s) NodeAddr=127.0.0.1 $shape
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
END
    echo "CgroupAutomount=no" > "$folder/cgroup.conf"
    # each in a session of its own, so that a signal for this script leaves them to end the jobs first
    setsid munged --foreground --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" --num-threads=2 > "$folder/munged.out.log" 2>&1 &
    daemons+=($!)
    wait_for munged test -S "$folder/munge.socket"
    setsid slurmctld -D > "$folder/slurmctld.log" 2>&1 &
    daemons+=($!)
    wait_for slurmctld timeout 5 scontrol ping
    setsid slurmd -D > "$folder/slurmd.log" 2>&1 &
    daemons+=($!)
    wait_for "an idle node" sh -c 'timeout 5 sinfo -h -o %T | grep -q idle'
}

submit() {  # submit ARRAY: prints the job's number
    timeout 60 sbatch --parsable --array="$1" --chdir="$folder" --output="$folder/job_%A_%a.log" --time=30 --wrap \
        "$PYTHON $SCRIPT $FLAGS --out $folder/shared/results.csv --shard \$SLURM_ARRAY_TASK_ID/\$SLURM_ARRAY_TASK_COUNT"
}

rows() { cat "$folder"/shared/results.*.csv 2> /dev/null | grep -vc '^experiment,' || true; }
ended() { [ -z "$(timeout 20 squeue --noheader --jobs "$1" 2> /dev/null)" ]; }  # an old job's number is an error, without output
begun() { [ "$(wc -l 2> /dev/null < "$1")" -ge 3 ]; }  # a header and two rows

check() {
    "$PYTHON" - "$folder" $ROWS << 'END'
import csv
import sys
from pathlib import Path

folder, expected = Path(sys.argv[1]), int(sys.argv[2])
KEY = ("experiment", "model", "task", "m", "n", "subsample", "seed")


def read(files):
    rows = [row for file in files for row in csv.DictReader(open(file, newline=""))]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


shares = sorted((folder / "shared").glob("results*.csv"))
plain, shared = read([folder / "plain.csv"]), read(shares)
keys = [tuple(row[name] for name in KEY) for row in shared]
print("rows per file:", ", ".join(f"{file.name} {len(read([file]))}" for file in shares))
print(f"{len(keys)} rows, {len(set(keys))} different keys, {expected} expected, {len(plain)} in the plain run")
equal = sorted(map(str, plain)) == sorted(map(str, shared))
print("all columns but seconds are equal" if equal else "rows DIFFER from those of the plain run")
sys.exit(not (len(keys) == len(set(keys)) == len(plain) == expected and equal))
END
}

say "$("$PYTHON" -c 'import torch; print("torch", torch.__version__)'), $(getconf _NPROCESSORS_ONLN) CPUs"
timeout $LIMIT "$PYTHON" "$SCRIPT" $FLAGS --out "$folder/plain.csv" > "$folder/plain.log" 2>&1
say "one plain run: $ROWS rows"

start_slurm
say "$(sbatch --version) is up: $(sinfo -h -o '%n %c CPUs %m MB')"

job=$(submit 1-4)
wait_for "the first rows of task 2" begun "$folder/shared/results.2-of-4.csv"
timeout 60 scancel "${job}_2"
say "job array $job (1-4): task 2 cancelled, with $(rows) rows of all tasks written"
wait_for "the job array" ended "$job"
left=$(rows)
say "job array $job has ended: $left rows"
[ "$left" -lt $ROWS ] || { echo "FAIL: the cancelled task had finished before"; exit 1; }

job=$(submit 1-3)  # another number of shares
wait_for "the second job array" ended "$job"
say "job array $job (1-3) has ended: $(rows) rows"
grep -h 'finished before' "$folder"/job_"$job"_*.log | sed 's/, into.*//; s/^/        /'
check
