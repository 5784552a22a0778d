"""The verbs about clusters of jobs, where one file per verb would be too many in one folder."""
