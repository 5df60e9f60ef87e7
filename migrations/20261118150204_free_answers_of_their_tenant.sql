-- Behind a long statement everybody else would wait too: then this fails, and may be run again.
set local lock_timeout = '5s';

-- Who erases a user opens the answers to keys that acted for nobody: a page reads a page of them.
create index idempotency_of_keys on idempotency (tenant_id, principal, route, key) where caller is null;

-- Each stored answer locked its tenant's one row, thousands of times a second. An answer whose request outlives
-- its tenant is left behind instead, and removed by the function below.
alter table idempotency drop constraint idempotency_tenant_fkey;

-- Deletes up to p_limit answers of tenants that are gone, and answers how many. Steps from tenant to tenant, so it
-- costs as much as there are tenants with answers, and not as much as there are answers.
create function erase_lost_answers(p_limit integer) returns integer
language sql volatile security definer
set search_path = pg_catalog, public
as $$
  with recursive found as (
    (select i.tenant_id
       from idempotency i
      order by i.tenant_id
      limit 1)
     union all
    select (select i.tenant_id
              from idempotency i
             where i.tenant_id > f.tenant_id
             order by i.tenant_id
             limit 1)
      from found f
     where f.tenant_id is not null
  ), lost as (
    select i.ctid
      from found f
     cross join lateral (select o.ctid from idempotency o where o.tenant_id = f.tenant_id limit p_limit) i
     where not exists (select 1 from tenants t where t.id = f.tenant_id)
     limit p_limit
  ), erased as (
    delete from idempotency
     where ctid = any (array(select ctid from lost))
 returning 1
  )
  select count(*)::integer
    from erased
$$;
alter function erase_lost_answers(integer) owner to throughline_definer;
revoke execute on function erase_lost_answers(integer) from public;
grant execute on function erase_lost_answers(integer) to throughline_service;
