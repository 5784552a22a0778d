"""`cumulo simulate`: deployments, clusters and networks in virtual time, by the code that decides in real ones."""

import typer

from cumulo.cli.simulation import autoscale, cluster, network, serve

app = typer.Typer()
app.command("serve", epilog=serve.EXAMPLE)(serve.serve)
app.command("autoscale", epilog=autoscale.EXAMPLE)(autoscale.autoscale)
app.command("cluster", epilog=cluster.EXAMPLE)(cluster.cluster)
app.command("network", epilog=network.EXAMPLE)(network.network)
