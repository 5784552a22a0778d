"""Pipeline schedules as plain data: generators, a checker, a simulator and pictures; no torch."""
