"""`cumulo kubernetes`: check manifests without a cluster; Cumulo's autoscaling rule as KEDA's external scaler."""

from pathlib import Path

import typer

from cumulo.cli.shared.terminal import out
from cumulo.errors import ConfigError

app = typer.Typer()
SCALER_EXAMPLE = "Example: [bold]cumulo kubernetes scaler --port 9090[/bold]"
CHECK_EXAMPLE = "Example: [bold]cumulo kubernetes check examples/kubernetes/queues.yaml[/bold]"


@app.command(epilog=CHECK_EXAMPLE)
def check(
    files: list[Path] = typer.Argument(
        ..., metavar="FILES", help="YAML or JSON files, folders with them, or - for the standard input."
    ),
    crds: Path | None = typer.Option(
        None,
        metavar="DIR",
        help="Folder with CustomResourceDefinitions that replace or extend the shipped schemas.",
    ),
    node_gpus: int = typer.Option(8, min=1, help="Number of GPUs on a node of your cluster."),
    plan: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="A plan that `cumulo plan serve --out` wrote: GPUs, replicas, tp and pp must be the plan's.",
    ),
    exists: list[str] | None = typer.Option(
        None, metavar="KIND/NAME", help="An object that is in the cluster already, such as LocalQueue/team-a."
    ),
) -> None:
    """Check manifests against their schemas, against each other and against the nodes, without a cluster.

    The schemas of Volcano, Kueue, KubeRay, LeaderWorkerSet, InferencePool, KEDA, ServiceMonitor and of core objects
    ship with Cumulo. Every problem is printed with its file, line and field; the exit status is 1 if there is one.
    Needs jsonschema: pip install 'cumulo[kubernetes]'.
    """
    from cumulo.cli.launch import refused_by
    from cumulo.cli.serve import serve
    from cumulo.cluster.drivers.kubernetes.check import check_files
    from cumulo.cluster.drivers.kubernetes.fit import served_commands

    for one in exists or ():
        if "/" not in one:
            raise ConfigError(f"--exists needs KIND/NAME, such as LocalQueue/team-a; got {one}")
    manifests, problems = check_files(files, crds=crds, node_gpus=node_gpus, exists=exists or (), plan=plan)
    for path, words, owner in served_commands(manifests):
        if refused := refused_by(serve, words):
            owner.blame(path, f"cumulo serve: {refused}")
    problems = [problem for one in manifests for problem in one.problems]
    for problem in problems:
        out.print(str(problem), soft_wrap=True)
    count = f"{len(manifests)} object{'s' if len(manifests) != 1 else ''}"
    if problems:
        out.print(f"{count}, {len(problems)} problem{'s' if len(problems) != 1 else ''}")
        raise typer.Exit(1)
    out.print(f"{count}, no problems")


@app.command(epilog=SCALER_EXAMPLE)
def scaler(
    host: str = typer.Option("0.0.0.0", help="Address to listen on."),
    port: int = typer.Option(9090, min=0, max=65535, help="Port to listen on; 0: any free one."),
) -> None:
    """Serve Cumulo's autoscaling rule to KEDA, as an external scaler (gRPC).

    A ScaledObject with a trigger of type external names this server, the pods and the rule;
    `autoscaler: cumulo` in a job file writes all of them. Needs grpcio: pip install 'cumulo[keda]'.
    """
    import logging

    from cumulo.cluster.drivers.kubernetes.keda_scaler import KedaScaler, serve_scaler

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    server, bound = serve_scaler(KedaScaler(), f"{host}:{port}")
    out.print(f"KEDA's external scaler listens on {host}:{bound}; press Ctrl+C to stop")
    try:
        server.wait_for_termination()
    except KeyboardInterrupt:
        server.stop(1).wait()
