"""Collectives: algorithms as schedules that are proved, run on processes, simulated on a fabric and drawn."""
