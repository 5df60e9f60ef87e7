-- Which secret keys stored data was made with, of all tenants at once: a node asks when it starts, so that a wrong
-- SECRET_KEY is said before the first request fails of it. The answer holds ids of keys and counts, and nothing of a
-- tenant. Its cost grows with the tenants, their agents and issuers, and never with what their people wrote: of the
-- entries of an audit it reads the first, and of stored answers the newest p_sample of each tenant.
create function secret_keys_in_use(p_sample integer)
returns table (place text, key_id bytea, rows bigint)
language sql stable security definer
set search_path = pg_catalog, public
as $$
  select 'agents', substring(api_key_enc from 2 for 4), count(*)
    from agents
   where api_key_enc is not null
   group by 2
   union all
  select 'issuers', substring(secret_enc from 2 for 4), count(*)
    from issuers
   where secret_enc is not null
   group by 2
   union all
  select 'audit_heads', h.key_id, count(*)
    from audit_heads h
   group by 2
   union all
  select 'audit_entries', e.key_id, count(*)
    from tenants t
   cross join lateral (select a.key_id
                         from audit a
                        where a.tenant_id = t.id
                        order by a.seq
                        limit 1) e
   group by 2
   union all
  select 'stored_answers', substring(s.answer_enc from 2 for 4), count(*)
    from tenants t
   cross join lateral (select i.answer_enc
                         from idempotency i
                        where i.tenant_id = t.id
                        order by i.created_at desc
                        limit p_sample) s
   where s.answer_enc is not null
   group by 2
$$;
alter function secret_keys_in_use(integer) owner to throughline_definer;
revoke execute on function secret_keys_in_use(integer) from public;
grant execute on function secret_keys_in_use(integer) to throughline_service;
