"""Commands of the cloud: Kubernetes manifests, autoscaling."""
