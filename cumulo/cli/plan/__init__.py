"""`cumulo plan`: predictions for training, serving and a whole cluster, and how accurate they have been."""

import typer

from cumulo.cli.plan import cluster, serve, train, validate

app = typer.Typer()
app.command("train", epilog=train.EXAMPLE)(train.train)
app.command("serve", epilog=serve.EXAMPLE)(serve.serve)
app.command("cluster", epilog=cluster.EXAMPLE)(cluster.cluster)
app.command("validate", epilog=validate.EXAMPLE)(validate.validate)
