-- The end of a tenant: its rows go in batches, by a job that any node can take up again, and its own
-- row goes last.

-- Lets the erasing function below delete from a table, and see what it deletes.
create function install_definer_erase(target regclass) returns void
language plpgsql
set search_path = pg_catalog, public
as $$
begin
  if not exists (select 1 from pg_policy where polrelid = target and polname = 'definer_read') then
    perform install_definer_read(target);
  end if;
  execute format('create policy definer_erase on %s for delete to throughline_definer using (true)', target);
  execute format('grant delete on %s to throughline_definer', target);
end
$$;
revoke execute on function install_definer_erase(regclass) from public;

select install_definer_erase(t)
  from unnest(array['api_keys', 'idempotency', 'audit', 'audit_heads', 'usage_hourly',
                    'issuers', 'agents', 'identities', 'users']::regclass[]) as t;
grant delete on tenants, jobs to throughline_definer;
grant select on jobs to throughline_definer;

-- Deletes up to p_limit rows of a tenant that is being deleted, children before parents, and answers
-- how many. At 0 nothing of the tenant is left, its own row included. The service may not delete such
-- rows itself (the audit least of all): only this way, and only once the tenant's state says so.
create function erase_tenant(p_tenant_id uuid, p_limit integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, public
as $$
declare
  target  text;
  erased  integer;
begin
  if not exists (select 1 from tenants where id = p_tenant_id and state = 'deleting') then
    return 0;
  end if;
  foreach target in array array['idempotency', 'api_keys', 'usage_hourly', 'issuers', 'agents',
                                'identities', 'users', 'audit', 'audit_heads'] loop
    execute format(
      'delete from %1$I where tenant_id = $1 and ctid = any (array(
         select ctid from %1$I where tenant_id = $1 limit $2))', target)
      using p_tenant_id, p_limit;
    get diagnostics erased = row_count;
    if erased > 0 then
      return erased;
    end if;
  end loop;
  delete from jobs where tenant_id = p_tenant_id;
  delete from tenants where id = p_tenant_id;
  return 0;
end
$$;
alter function erase_tenant(uuid, integer) owner to throughline_definer;
revoke execute on function erase_tenant(uuid, integer) from public;
grant execute on function erase_tenant(uuid, integer) to throughline_service;
