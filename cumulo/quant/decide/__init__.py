"""Pure: recipes, which matrices are quantised, and what the written configuration says."""
