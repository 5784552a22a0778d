"""The whole command, with the verbs of every group, for tests that call it in this process."""

from cumulo.cli.app import application

app = application()
