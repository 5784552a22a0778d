"""Pure decisions about a fleet: where a request goes, who may join, how many replicas there should be."""
