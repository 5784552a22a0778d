"""`cumulo plan`: know before you run. Training, serving, a whole cluster, and how right it has been."""

import typer

from cumulo.cli import plan_cluster, plan_serve, plan_train, plan_validate

app = typer.Typer(
    help="Know before you run: will it fit, how fast will it be, how to split it, what will it cost?",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("train", epilog=plan_train.EXAMPLE)(plan_train.train)
app.command("serve", epilog=plan_serve.EXAMPLE)(plan_serve.serve)
app.command("cluster", epilog=plan_cluster.EXAMPLE)(plan_cluster.cluster)
app.command("validate", epilog=plan_validate.EXAMPLE)(plan_validate.validate)
