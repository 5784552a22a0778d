"""Pictures of collective schedules."""
