"""The console: the server's own web pages. `cumulo serve` installs it into the API's application."""
