"""The control API of one storage node: HTTP and JSON for operators, tools and the web page."""
