"""Runners: carry out a StepPlan on a device."""
