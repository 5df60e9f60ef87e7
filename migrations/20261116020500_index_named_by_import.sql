-- An import looks for everyone whom the one before named, also where nothing is listed under the name.
create index users_named_by_import on users (tenant_id, id) where named_by_import;
