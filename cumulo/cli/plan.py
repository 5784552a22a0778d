"""`cumulo plan`: predictions for training, serving and a whole cluster, and how accurate they have been."""

import typer

from cumulo.cli import plan_cluster, plan_serve, plan_train, plan_validate

app = typer.Typer(
    help="Plan before you run: memory, speed, parallelism and cost.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("train", epilog=plan_train.EXAMPLE)(plan_train.train)
app.command("serve", epilog=plan_serve.EXAMPLE)(plan_serve.serve)
app.command("cluster", epilog=plan_cluster.EXAMPLE)(plan_cluster.cluster)
app.command("validate", epilog=plan_validate.EXAMPLE)(plan_validate.validate)
