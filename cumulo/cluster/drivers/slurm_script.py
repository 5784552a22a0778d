"""The batch script of a job: what `sbatch` is given. Pure text; `cumulo launch --on slurm --dry-run` prints it.

The gang is one allocation, so Slurm starts all of it or nothing. A lost node requeues the job (`--requeue`), and a
training run resumes from its last checkpoint, because its command is the same at every start. Before the time limit
Slurm signals the ranks (`--signal`), which save and end; `slurm_end.py` then queues the job again.
"""

import re
import shlex
import sys
from collections.abc import Iterator

from cumulo.cluster.drivers.command import SERVICE, output_file, server_arguments, work_command
from cumulo.cluster.job_file import JobFile
from cumulo.cluster.job_settings import DeviceGroup, seconds
from cumulo.cluster.job_store import JobRecord
from cumulo.cluster.served_shape import served_shape, server_tasks
from cumulo.errors import ConfigError

COMMENT = "cumulo:"  # with the submission key: how a job is found again

# Rank 0 is on the first node, where this script runs: a port that is free here is one where the ranks can meet.
_FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
# Tasks of each node as Slurm writes them, 2(x3),1: without --ntasks-per-node a node has as many as fit.
_RANK = """export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
tasks=()
for part in ${SLURM_STEP_TASKS_PER_NODE//,/ }; do
  times=1; [[ $part == *x* ]] && times=${part##*x} && times=${times%)}
  for ((number = 0; number < times; number++)); do tasks+=("${part%%(*}"); done
done
export LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE:-${tasks[$SLURM_NODEID]:-1}}
export MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
exec "$@\""""


def batch_script(record: JobRecord) -> str:
    groups = "\n#SBATCH hetjob\n".join(
        "\n".join(f"#SBATCH {line}" for line in _group_lines(record.job, group))
        for group in record.job.devices
    )
    header = "\n".join(f"#SBATCH {line}" for line in _job_lines(record))
    each = record.job.devices[0].per_node or 1
    spread = f" --ntasks=$((SLURM_JOB_NUM_NODES * {each})) --ntasks-per-node={each}"
    folder, python = shlex.quote(record.folder), shlex.quote(sys.executable)
    het = (
        f" --het-group={','.join(map(str, range(len(record.job.devices))))}"
        if len(record.job.devices) > 1
        else ""
    )
    step = het if record.job.elastic is None else spread
    head = f"""#!/bin/bash
{header}
{groups}
echo $SLURM_JOB_ID > {folder}/handle
echo "--- attempt $((${{SLURM_RESTART_COUNT:-0}} + 1)) ---"
"""
    if record.job.serve is not None:
        return head + _service(record, python, het)
    return f"""{head}export MASTER_PORT=$({python} -c "{_FREE_PORT}")
srun{step} --kill-on-bad-exit=1 --unbuffered bash -c {shlex.quote(_RANK)} rank \\
  {shlex.join(work_command(record))}
exec {python} -m cumulo.cluster.drivers.slurm_end {folder} $?
"""


# Each task is a server, which sees its own GPUs of those that the job has on the node; the gateway on the first
# node is the address of the service.
_SERVER = """IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
if [ ${{#gpus[@]}} -gt {each} ]; then
  mine=("${{gpus[@]:$((SLURM_LOCALID * {each})):{each}}}")
  export CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${{mine[*]}}")
fi
exec "$@" --host 0.0.0.0 --port $((CUMULO_PORT + 1 + SLURM_PROCID))"""
# Where each server will be: a step with the same tasks says it, one line for each, in their order.
_PLACES = 'echo "$SLURM_PROCID $SLURMD_NODENAME"'
_ADDRESS = r"""scontrol show node "$node" -o | sed -E 's/.* NodeAddr=([^ ]+).*/\1/'"""


def _service(record: JobRecord, python: str, het: str) -> str:
    """The fleet's key is made by the job and known to its own processes only."""
    serve = record.job.serve
    assert serve is not None
    job, several = record.job, len(record.job.devices) > 1
    if job.elastic is not None:
        raise ConfigError(f"{job.name}: a service --on slurm has a fixed number of servers; remove elastic")
    whole = served_shape(job).prefill  # a plan of several roles is one server
    arguments = ["--plan", str(serve.plan), *serve.options] if whole else server_arguments(serve)
    command = [sys.executable, "-m", "cumulo", "serve", *arguments]
    server = _SERVER.format(each=1 if several else server_tasks(job).devices)
    return f"""export CUMULO_PORT={serve.port or 8000}
export CUMULO_FLEET_KEY=$({python} -c "import secrets; print(secrets.token_hex(32))")
urls=() places=()
while read -r number node; do
  address=$({_ADDRESS}) port=$((CUMULO_PORT + 1 + number))
  urls+=("http://$address:$port") places+=("$address/$port")
done < <(srun{het} bash -c {shlex.quote(_PLACES)} < /dev/null | sort -n)
srun{het} --unbuffered bash -c {shlex.quote(server)} server \\
  {shlex.join(command)} &
listening() {{ for place in "${{places[@]}}"; do (: > "/dev/tcp/$place") 2> /dev/null && return; done; return 1; }}
until listening; do kill -0 $! 2> /dev/null || exit 1; sleep 1; done
echo "{SERVICE} is ready at http://$(hostname):$CUMULO_PORT/v1"
exec {python} -m cumulo gateway "${{urls[@]}}" --host 0.0.0.0 --port $CUMULO_PORT --wait-for-replica 120
"""


def _job_lines(record: JobRecord) -> Iterator[str]:
    job, slurm = record.job, record.job.slurm
    yield f"--job-name={record.job_id}"
    yield f"--comment={COMMENT}{_word(record.key, '--key')}"
    yield f"--output={_word(str(output_file(record)), 'the path of --store').replace('%', '%%')}"
    yield f"--chdir={_word(record.working_folder, 'the path of this folder')}"
    yield "--open-mode=append"
    yield "--requeue"
    if job.time_limit is not None:
        yield f"--time={_minutes(job.time_limit)}"
        yield f"--signal=TERM@{seconds(job.save_before, 'save_before'):.0f}"
    if job.deadline is not None:
        yield f"--deadline=now+{seconds(job.deadline, 'deadline'):.0f}"
    if job.priority < 0:
        yield f"--nice={-job.priority}"
    for name in ("account", "qos"):
        if (value := getattr(slurm, name)) is not None:
            yield f"--{name}={value}"


def _group_lines(job: JobFile, group: DeviceGroup) -> Iterator[str]:
    if job.slurm.partition is not None:
        yield f"--partition={job.slurm.partition}"
    kind = "" if group.kind == "gpu" else f":{group.kind}"
    elastic = job.elastic
    # A rank has a task of its own; a server starts the ranks of its replica itself.
    servers = server_tasks(job) if job.serve is not None and len(job.devices) == 1 else None
    each = 1 if servers is None else servers.devices
    if group.per_node is not None:
        nodes = str(group.tasks)
        if elastic is not None:
            nodes = f"{elastic.min // group.per_node}-{elastic.max // group.per_node}"
        yield f"--nodes={nodes}"
        # With a number of tasks Slurm would give an elastic job the fewest nodes: its step says it instead.
        tasks = group.per_node // each
        yield f"--ntasks-per-node={tasks}" if elastic is None else f"--mincpus={group.per_node}"
        if not group.on_cpu:
            yield f"--gres=gpu{kind}:{group.per_node}"
    else:
        yield f"--ntasks={group.count // each}"
        if not group.on_cpu:
            yield f"--gpus-per-task={kind.removeprefix(':')}{':' if kind else ''}{each}"
            yield "--gpu-bind=none"
    if elastic is None:
        yield f"--cpus-per-task={each}"
    if group.memory is not None:
        yield f"--mem-per-cpu={group.memory_mib}M"
    if job.slurm.exclusive:
        yield "--exclusive"
    yield from job.slurm.options


def _word(text: str, what: str) -> str:
    """One word of a #SBATCH line, which ends with the line whatever quotes it."""
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise ConfigError(
            f"{what} is {text!r}, and a batch script of Slurm cannot contain a line end or another control "
            "character: choose another one"
        )
    return re.sub(r"""([\s"'#\\])""", r"\\\1", text)


def _minutes(limit: str) -> str:
    """The limit as Slurm writes times: in whole minutes."""
    minutes = max(1, -(-int(seconds(limit, "time_limit")) // 60))
    return f"{minutes // 1440}-{minutes % 1440 // 60:02}:{minutes % 60:02}:00"
