"""Schedules and other traffic played in virtual time, on fabrics you may not have."""
