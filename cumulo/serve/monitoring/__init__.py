"""What watches a server from outside: a Grafana dashboard, Prometheus' alert rules, and a way to write them out."""
