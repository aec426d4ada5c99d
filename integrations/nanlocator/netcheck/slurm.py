"""An sbatch script that starts the network check like the training: one launcher per node."""

import shlex
from collections.abc import Sequence

# The port is derived from the job's number, so that two jobs on one host do not collide; 29400 is torchrun's.
_TEMPLATE = """\
#!/bin/bash
# nanlocator netcheck on the nodes of a job. Fill in the lines marked with <==, then: sbatch THIS_FILE
#SBATCH --job-name=netcheck
#SBATCH --nodes=2                 # <== as many as the training uses
#SBATCH --ntasks-per-node=1       # one launcher per node; it starts one rank per GPU
#SBATCH --gpus-per-node=8         # <== GPUs of one node
#SBATCH --cpus-per-task=64        # <== cores of one node
#SBATCH --exclusive
#SBATCH --time=00:10:00
#SBATCH --output=netcheck-%j.log
# #SBATCH --partition=...         # <== if your site requires them
# #SBATCH --account=...

set -euo pipefail

# <== whatever the training script does before it starts Python: modules, environment, NCCL_* variables.
# source /path/to/venv/bin/activate
# export NCCL_SOCKET_IFNAME=...

ranks_per_node=${SLURM_GPUS_ON_NODE:-8}
first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((29400 + SLURM_JOB_ID % 10000))

# Exit status: 0 healthy, 1 findings (the verdict names the hosts to exclude), 2 wrong use.
srun --kill-on-bad-exit=0 python -m nanlocator.netcheck \\
  --nnodes "$SLURM_JOB_NUM_NODES" \\
  --nproc-per-node "$ranks_per_node" \\
  --rdzv-backend c10d \\
  --rdzv-id "$SLURM_JOB_ID" \\
  --rdzv-endpoint "$first_host:$port"@ARGUMENTS@
"""


def template(arguments: Sequence[str]) -> str:
    """The script, with `arguments` (netcheck's own, unquoted) after the module."""
    words = "".join(f" {shlex.quote(argument)}" for argument in arguments)
    return _TEMPLATE.replace("@ARGUMENTS@", words)
