"""The command line, against a stand-in server that speaks just enough of TF Serving's REST API."""
