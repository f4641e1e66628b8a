"""The configuration's file, and the types of its fields, for `watersmeet.settings`."""
