"""Jobs on a cluster: policies (`decide/`), their rehearsal on a trace (`simulate/`), and drivers that obey them."""
