"""The application on top of the library: the command line, the paper's experiments, data sets and reports."""
