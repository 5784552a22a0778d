"""Who holds what: layouts, boxes and pieces. Pure."""
