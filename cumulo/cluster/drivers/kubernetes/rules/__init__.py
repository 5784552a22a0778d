"""Rules of the API server that no schema has, one file per subject. Called by sense and references."""
