"""`cumulo simulate`: deployments, clusters and networks in virtual time, by the code that decides in real ones."""

import typer

from cumulo.cli.simulation import autoscale, cluster, network, serve

app = typer.Typer(
    no_args_is_help=True,
    help="Simulate a deployment in virtual time, with the real scheduler.",
    rich_markup_mode="rich",
)
app.command("serve", epilog=serve.EXAMPLE)(serve.serve)
app.command("autoscale", epilog=autoscale.EXAMPLE)(autoscale.autoscale)
app.command("cluster", epilog=cluster.EXAMPLE)(cluster.cluster)
app.command("network", epilog=network.EXAMPLE)(network.network)
