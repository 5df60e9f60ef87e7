-- The operator's own plane stores first answers too (new tenants, with their first keys): the job that
-- forgets them is planned for it as for every tenant.
insert into jobs (id, tenant_id, kind, run_at)
values (gen_random_uuid(), '00000000-0000-0000-0000-000000000000', 'expire_answers', now());
