"""Pipeline schedules as data, and what checks them. Pure."""
