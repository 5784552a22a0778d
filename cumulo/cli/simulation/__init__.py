"""`cumulo simulate`: deployments, clusters and networks in virtual time, by the code that decides in real ones."""
