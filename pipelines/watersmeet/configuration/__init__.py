"""The configuration's file, and the types of its fields; `watersmeet.settings` puts them
together.
"""
