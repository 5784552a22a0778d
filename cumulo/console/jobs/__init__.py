"""The page Jobs: queue, cluster map and timeline."""
