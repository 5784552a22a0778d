"""Folders of manifests that are more than files: Helm charts and kustomizations. Read by the check."""
