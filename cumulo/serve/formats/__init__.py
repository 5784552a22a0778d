"""What models write instead of plain text: tool calls and reasoning. Text in, events out; nothing else."""
