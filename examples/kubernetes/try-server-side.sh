#!/bin/sh
# Ask the API server that kubectl points at whether it would take the manifests of a folder. Creates nothing.
#   cumulo launch examples/job-serve-gpu.yaml --on kubernetes --out manifests
#   examples/kubernetes/try-server-side.sh manifests
set -eu
folder=${1:?usage: try-server-side.sh FOLDER}
command -v kubectl >/dev/null || { echo "kubectl is not installed: run it where it is" >&2; exit 2; }
failed=0
for file in "$folder"/*.yaml; do
  kubectl apply --server-side --dry-run=server --validate=strict --field-manager=cumulo -f "$file" || failed=1
done
exit $failed
