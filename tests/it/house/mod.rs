//! The project itself: its imports, its words, its documents, its OpenAPI document and its migrations.

mod architecture;
mod docs;
mod migrations;
mod openapi;
mod words;
