"""Which nodes a job gets: a `Snapshot` in, decisions with reasons out. Pure: no clock, no socket, no torch."""
