from fastapi import FastAPI

from cumulo.console.shell import Shell


def register(shell: Shell, app: FastAPI) -> None: ...
