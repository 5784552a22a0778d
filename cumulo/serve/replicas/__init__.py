"""Several engines of one server behind the interface of one."""
