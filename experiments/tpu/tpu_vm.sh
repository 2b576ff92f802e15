#!/usr/bin/env bash
# Runs experiments/run.py on every host of a Cloud TPU slice, over the committed state of this checkout.
#
#   experiments/tpu/tpu_vm.sh NAME ZONE --bench gsm8k --policy POLICY --workers experiments/workers/vllm_tpu.toml \
#       --mesh fsdp=16 --compute-dtype bfloat16 --remat --out runs/big --checkpoint-dir gs://BUCKET/big
#
# All flags after the zone are those of experiments/run.py; --distributed is added. Files that they name must be in
# the checkout, or be there on every host. Run it again with --resume to go on after a stop.
set -euo pipefail
cd "$(dirname "$0")/../.."

if (($# < 3)); then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
name=$1 zone=$2
shift 2

archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
git archive --format=tar.gz --output="$archive" HEAD

gcloud compute tpus tpu-vm scp "$archive" "$name:lemon.tar.gz" --zone="$zone" --worker=all
# Quoted once more for the shell of the hosts.
flags=$(printf ' %q' "$@")
gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="
    set -e
    mkdir -p lemon && tar -xzf lemon.tar.gz -C lemon && cd lemon
    PATH=\$HOME/.local/bin:\$PATH
    command -v uv >/dev/null || python3 -m pip install --quiet --user uv || {
        echo 'error: cannot install uv, which brings Python 3.12; put uv on every host' >&2
        exit 1
    }
    [ -x .venv/bin/python ] || uv venv --quiet --python 3.12 .venv
    uv pip install --quiet --python .venv/bin/python -e '.[tpu,gcs]'
    exec .venv/bin/python experiments/run.py --distributed$flags"
