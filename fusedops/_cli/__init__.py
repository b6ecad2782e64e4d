"""The command line: one file for each command. ``main.py`` builds the parser."""
