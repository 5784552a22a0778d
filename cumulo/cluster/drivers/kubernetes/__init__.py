"""Kubernetes: manifests from a job file or a plan, and the check of manifests without a cluster."""
