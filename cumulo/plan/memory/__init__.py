"""Memory of a training job, part by part."""
