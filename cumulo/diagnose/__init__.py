"""What pasted outputs say about a slow collective, and mistakes in a network before they cost a run."""
