"""The configuration's file, and the types of its fields; `pipelines.settings` puts them
together.
"""
